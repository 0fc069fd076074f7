"""`python -m trainyard.cli`: the command where nothing is on the PATH, as in job scripts."""

from trainyard.cli.main import main

if __name__ == "__main__":
    main()
