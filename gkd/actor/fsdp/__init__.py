"""Train the student with torch's fully_shard: any causal language model of transformers, all ranks data parallel.

student.py    the student of one rank                 passes.py  forward and backward over micro-batches
model.py      HF folder -> sharded module, LM head    probe.py   check that the model fits packing and the fused loss
attention.py  packed sequences in transformers        lora.py    adapters and merged weights
weights.py    safetensors <-> shards                  optim.py   AdamW, clipping
"""
