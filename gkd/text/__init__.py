"""Texts in the tokens of two tokenizers: what a teacher with another tokenizer has in common with the student."""
