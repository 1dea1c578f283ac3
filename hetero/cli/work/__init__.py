"""What commands do, imported when one runs: the help of a command loads none of it."""
