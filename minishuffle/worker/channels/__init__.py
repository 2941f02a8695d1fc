"""Links to other workers, and who reads which partition over them."""
