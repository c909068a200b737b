"""`python -m fmol` is `fmol`."""

from fmol.cli import main

if __name__ == "__main__":
    main()
