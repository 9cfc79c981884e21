"""`python -m openmla` is the `openmla` command."""

from openmla.cli import main

if __name__ == "__main__":
    main()
