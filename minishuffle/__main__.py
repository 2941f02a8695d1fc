"""``python -m minishuffle``: the command ``minishuffle``, for a Python whose scripts are not in the path."""

from minishuffle.cli.entry import main

if __name__ == "__main__":
    main()
