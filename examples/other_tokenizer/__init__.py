"""A student with SentencePiece tokens learns from a teacher with others: bash examples/other_tokenizer/run.sh"""
