"""Measurements behind `minishuffle bench`; nothing else imports them."""
