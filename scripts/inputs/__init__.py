"""What programs read: texts cut into prompts, made-up facts, prompts as others publish them, RULER's tasks."""
