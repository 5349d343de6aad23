"""Room: `python -m worldsize` is the command `worldsize`."""

from worldsize.cli.main import main

if __name__ == "__main__":
    main()
