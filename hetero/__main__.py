"""`python -m hetero` is the `hetero` command."""

from hetero.start import main

if __name__ == "__main__":
    main()
