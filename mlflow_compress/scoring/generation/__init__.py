"""Generated text: prompts, decoding, sampling."""
