"""`python -m deepswe`, the same as the command."""

from deepswe.cli.main import main

if __name__ == "__main__":
    main()
