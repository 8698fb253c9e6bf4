"""The student on Megatron-core: NCCL and CUDA on GPUs, gloo and CPU where there are none.

layout.py      ranks -> (tp, pp, dp, ep)                   groups.py     Megatron's process groups
cpu_shim.py    Megatron without CUDA                       attention.py  core attention, padded or packed
hf_config.py   HF config.json -> sizes and features        layer_spec.py the modules that layers are made of
experts.py     a mixture of experts' settings              model.py      the GPT models of a rank
hf_mapping.py  HF tensors <-> this rank's shards           hf_load.py    safetensors -> shards
hf_save.py     shards -> a HF folder                       optim.py      AdamW, clipping, LR schedule
pipeline.py    forward and backward, loss                  checkpoint.py exact resume
student.py     all of it behind one class
"""
