"""Programs for maintainers: the bundled model, the pictures of the front page, wheels, GGUF files."""
