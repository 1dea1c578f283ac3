"""The `hetero` command line. Thin: parses, calls the library, prints."""
