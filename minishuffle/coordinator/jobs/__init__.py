"""A job from its submission to its end: its life cycle, its failures, its row accounting."""
