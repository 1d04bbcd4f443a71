"""One model over several processes, by PyTorch alone: FSDP2 and HSDP, tensor and pipeline parallelism on one mesh.

`options` are what a user writes and `layout` what comes of it, both free of torch; `world` is the processes,
`sharding` and `tensor_parallel` place a model's parameters, and `engine` (with `pipeline`) is what the training loop
calls. A component that runs in one process pays for none of it. Left out on purpose: sequence (context) and expert
parallelism, and any second framework.
"""
