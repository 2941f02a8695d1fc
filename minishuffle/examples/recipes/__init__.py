"""The cookbook: programs that are copied and run, each for one task; ``examples/README.md`` lists them."""
