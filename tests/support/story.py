"""The story's crash as SGLang logs it: SGLang's gates open over FlashInfer's closed one."""

from __future__ import annotations

STORY = """\
[2026-03-01 10:00:00] server_args=ServerArgs(model_path='/m', tp_size=8, api_key='s3cret-key')
[2026-03-01 10:01:00 TP0] Load weight end. type=GlmMoeDsaForCausalLM, dtype=torch.bfloat16, avail mem=30.00 GB
[2026-03-01 10:01:01 TP3] Scheduler hit an exception: Traceback (most recent call last):
  File "/v/sglang/srt/managers/scheduler.py", line 3000, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/v/flashinfer/jit/comm.py", line 77, in gen_trtllm_comm_module
    nvcc_flags = current_compilation_context.get_nvcc_flags_list(
  File "/v/flashinfer/compilation_context.py", line 62, in get_nvcc_flags_list
    raise RuntimeError(
RuntimeError: No supported CUDA architectures found for major versions [9, 10].

[2026-03-01 10:01:02] Received sigquit from a child process. It usually means the child failed.
[2026-03-01 10:01:02] Received sigquit from a child process. It usually means the child failed.
"""
