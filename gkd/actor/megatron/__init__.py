"""Train the student with Megatron-core: NCCL and CUDA on GPUs, gloo on CPU.

student.py     the student of one rank                pipeline.py       forward, backward and loss of a global batch
model.py       the GPT models of a rank               model_config.py   HF config.json -> Megatron's configuration
layer_spec.py  modules of a layer, experts            hf_mapping.py     HF tensors of a parameter, TP layouts, loading
hf_export.py   shards -> HF tensors                   checkpoint.py     exact resume
lora.py        adapters of Megatron's layers          optim.py          AdamW
layout.py      ranks -> (tp, pp, dp, ep)              cpu_shim.py       Megatron without CUDA
fused.py       compiled operations of a layer
"""
