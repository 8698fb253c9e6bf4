"""The student on torch's fully_shard: any causal language model of transformers, every rank data parallel.

model.py      HF folder -> sharded module         head.py   the LM head on the loss rows, with the loss
attention.py  packed sequences in transformers    probe.py  does the model compute what the loss assumes
weights.py    safetensors <-> shards              conversion.py  files that are named or cut unlike the model
lora.py       adapters, and the merged weights    optim.py  AdamW, clipping
preflight.py  checks before any process starts    checkpoint.py  exact resume
student.py    all of it behind one class
"""
