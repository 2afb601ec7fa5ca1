"""From a model's name to what an engine is built of: weights, fit, memory."""
