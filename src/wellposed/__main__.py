"""python -m wellposed: the same as the command `wellposed`, for torchrun. The command line belongs
to the laboratory."""

import runpy

if __name__ == "__main__":
    runpy.run_module("wellposed_lab", run_name="__main__")
