"""`python -m wellposed_lab` is `wellposed`."""

from wellposed_lab.cli import main

if __name__ == "__main__":
    main()
