"""``python -m minishuffle.cli``: how child processes are started."""

from minishuffle.cli.entry import main

if __name__ == "__main__":
    main()
