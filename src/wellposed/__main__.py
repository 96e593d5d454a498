"""python -m wellposed: the same as the command `wellposed`, for torchrun."""

from wellposed.cli import main

if __name__ == "__main__":
    main()
