"""Files that hold models as others store them: checkpoints, GGUF, tokenizers, chat templates."""
