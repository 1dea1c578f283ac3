"""`hetero serve`: contexts and answers over HTTP. The HTTP process and the engine process."""
