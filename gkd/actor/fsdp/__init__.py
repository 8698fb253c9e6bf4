"""Train the student with torch's fully_shard: any causal language model of transformers, all ranks data parallel.

student.py     the student of one rank           passes.py      forward and backward over micro-batches
model.py       HF folder -> sharded module       head.py        LM head on the loss rows, with the loss
attention.py   packed sequences in transformers  probe.py       check that the model fits packing and the fused loss
weights.py     safetensors <-> shards            conversion.py  files whose tensors differ from the parameters
lora.py        adapters and merged weights       host_block.py  offloaded shards in one pinned block
optim.py       AdamW, clipping                   checkpoint.py  exact resume
"""
