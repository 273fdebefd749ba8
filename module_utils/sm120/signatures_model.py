"""The model's files, its quantisation, and the arguments."""

from __future__ import annotations

import re

from .signature import CAUSE, LOADING, WARNING, Signature

TOPIC = "The model, its quantisation, the arguments"

_TOKENIZER_MEANING = (
    "The tokenizer cannot be loaded: a file is missing, or the library is older than the file."
)
_TOKENIZER_ADVICE = (
    "Look for tokenizer.json and tokenizer_config.json in the model's folder; install "
    "the release set's versions."
)

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        name="arguments.refused",
        role=CAUSE,
        layer="arguments",
        needle=b"error: ",
        pattern=re.compile(
            rb"\.py: error: |error: (?:unrecognized arguments|argument |ambiguous option|"
            rb"the following arguments)"
        ),
        meaning="SGLang does not know an argument or does not accept its value.",
        advice="The line names it. Flags change between versions: compare with launch_server --help "
        "of the installed one.",
        fatal=True,
    ),
    Signature(
        name="model.no_path",
        role=CAUSE,
        layer="model",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)repo id must (?:be|use)|HFValidationError"
            rb"|is not a local folder and is not a valid model identifier|"
            rb"Can't load the configuration of|RepositoryNotFoundError"
            rb"|LocalEntryNotFoundError|"
            rb"couldn't connect to 'https://huggingface|does not appear to have a file named config\.json|"
            rb"Unrecognized model in |OfflineModeIsEnabled|outgoing traffic has been disabled"
        ),
        meaning="The model path is wrong, unreadable for the service user, or a hub name that "
        "cannot be fetched here.",
        advice="ls -l PATH/config.json as the service user; give an absolute path (role sglang_model).",
    ),
    Signature(
        name="model.gated",
        role=CAUSE,
        layer="model",
        needle=b"rror",
        pattern=re.compile(rb"(?i)gated repo|401 Client Error.*huggingface|403 Client Error.*huggingface"),
        meaning="The hub wants a token with access to this model.",
        advice="Accept its licence on the hub and give the token by variable, or copy the weights.",
    ),
    Signature(
        name="model.unknown_architecture",
        role=CAUSE,
        layer="model",
        needle=b"rror",
        pattern=re.compile(
            rb"model type `?'?\w+`?'? but Transformers does not recognize"
            rb"|Model architectures? \[.*\] (?:is|are) not supported|"
            rb"KeyError: 'glm_moe_dsa'|No module named 'transformers_modules"
        ),
        meaning="This SGLang or transformers does not know the model's architecture.",
        advice="A newer release set, or --trust-remote-code where the model brings its own code.",
    ),
    Signature(
        name="model.weights_missing",
        role=CAUSE,
        layer="model",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)cannot find any model weights|safetensors?_?rust\S*|SafetensorError|HeaderTooLarge|"
            rb"MetadataIncompleteBuffer|invalid header|FileNotFoundError: .*\.(?:safetensors|bin|gguf)"
        ),
        meaning="Weight files are missing or cut short.",
        advice="Compare the files with model.safetensors.index.json and download again; git-lfs "
        "pointers are 130 bytes.",
    ),
    Signature(
        name="model.tokenizer",
        role=CAUSE,
        layer="model",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)(?:can't|unable to|couldn't|could not|cannot) (?:load|instantiate|find).{0,60}tokenizer|"
            rb"tokenizer class \S+ does not exist|tokenizers?\.json"
        ),
        meaning=_TOKENIZER_MEANING,
        advice=_TOKENIZER_ADVICE,
    ),
    Signature(
        name="model.tokenizer",
        role=CAUSE,
        layer="model",
        needle=b"untagged enum ModelWrapper",
        meaning=_TOKENIZER_MEANING,
        advice=_TOKENIZER_ADVICE,
    ),
    Signature(
        name="model.expert_shape",
        role=CAUSE,
        layer="model",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)size of tensor a \(\d+\) must match .*tensor b"
            rb"|start .* \+ length .* exceeds dimension size|"
            rb"Attempted to load weight \(.*\) into parameter"
        ),
        stage=LOADING,
        meaning="A weight's shape does not fit the layer: typically BF16 shared experts fused into "
        "FP4 ones (sizes differ "
        "by two), or a tp that does not divide the experts.",
        advice="--disable-shared-experts-fusion; check that tp divides the expert sizes.",
    ),
    Signature(
        name="model.tp_does_not_divide",
        role=CAUSE,
        layer="arguments",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)is not divisible by|must be divisible by|not divisible by (?:weight )?quantization block"
        ),
        meaning="A dimension of the model is not divisible by the parallel size or the quantisation block.",
        advice="Choose a tp (or ep) that divides the heads, the experts and the intermediate size.",
    ),
    Signature(
        name="model.quantization",
        role=CAUSE,
        layer="model",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)quantization method .*(?:does not match|not supported|unknown|invalid)"
            rb"|hf_quant_config\.json|"
            rb"(?:modelopt|fp4|nvfp4|mxfp4).*(?:not supported|unsupported|requires)"
        ),
        meaning="The checkpoint's quantisation and the argument, or the GPU, do not fit.",
        advice="For NVFP4 checkpoints --quantization modelopt_fp4; look at quantization_config in "
        "config.json.",
    ),
    Signature(
        name="kernel.fp4",
        role=CAUSE,
        layer="kernels",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)(?:fp4|nvfp4|block.?scale|mxfp4).*(?:gemm|tactic|cutlass|assert|failed|error)|"
            rb"(?:gemm|cutlass).*(?:fp4|nvfp4)|Failed to initialize cutlass TMA"
        ),
        meaning="An FP4 kernel failed on this GPU.",
        advice="--fp4-gemm-backend flashinfer_cudnn, --moe-runner-backend flashinfer_cutlass; purge "
        "the JIT cache after "
        "every upgrade (module flashinfer_cache).",
    ),
    Signature(
        name="kernel.tactic_skipped",
        role=WARNING,
        layer="kernels",
        needle=b"actic",
        pattern=re.compile(rb"(?i)(?:skipping|failed|invalid) tactic"),
        meaning="The autotuner met kernels that do not run on this GPU and left them out.",
        advice="Harmless as long as others remain; throughput tells.",
    ),
    Signature(
        name="kernel.moe_config_missing",
        role=WARNING,
        layer="kernels",
        needle=b"Performance might be sub-optimal",
        meaning="No tuned MoE configuration ships for this GPU; defaults are used.",
        advice="--moe-runner-backend flashinfer_cutlass does not need one.",
    ),
    Signature(
        name="model.nan",
        role=CAUSE,
        layer="numerics",
        needle=b"NaN in the logits",
        meaning="The model computed no numbers. A kernel is wrong: on SM120 first suspect "
        "all-reduce fusion and FP4.",
        advice="sglang_server_allreduce_fusion: off, then playbooks/probe.yml; purge the JIT cache; "
        "another FP4 backend.",
    ),
    Signature(
        name="model.sampling_assert",
        role=CAUSE,
        layer="numerics",
        needle=b"probability",
        pattern=re.compile(rb"(?i)probability tensor contains either|TensorCompare\.cu.*probability"),
        meaning="Sampling met values that are no probabilities: NaN from a kernel.",
        advice="As for NaN in the logits: switch the fusion off, purge the JIT cache, another FP4 backend.",
    ),
    Signature(
        name="model.token_outside_vocabulary",
        role=CAUSE,
        layer="request",
        needle=b"ndex",
        pattern=re.compile(
            rb"IndexError: index out of range in self|vectorized_gather_kernel"
            rb"|Index\w*\.cu.*(?:srcIndex|index) (?:<|out of bounds)"
        ),
        meaning="A prompt held a token id that the vocabulary does not have; it kills the whole server.",
        advice="Find the client that sends token ids: it uses another tokenizer, or a benchmark's "
        "vocab_size is too large.",
    ),
    Signature(
        name="kernel.illegal_access",
        role=CAUSE,
        layer="kernels",
        needle=b"rror",
        pattern=re.compile(
            rb"(?i)illegal (?:memory access|instruction|address)|misaligned address"
            rb"|unspecified launch failure|"
            rb"device-side assert|cudaError(?:IllegalAddress|IllegalInstruction|LaunchFailure|Assert)"
        ),
        meaning="A kernel went wrong on the GPU. The line where it shows is often not the one that did it.",
        advice="Look at the kernel log for Xid 13 or 31; start once with CUDA_LAUNCH_BLOCKING=1; "
        "purge the JIT cache; "
        "switch the fusion off.",
    ),
    Signature(
        name="request.too_long",
        role=WARNING,
        layer="request",
        needle=b"rror",
        pattern=re.compile(rb"(?i)Requested token count exceeds|is longer than the model's context length"),
        meaning="A client asked for more tokens than the server takes.",
        advice="The client's business; context_length and max_total_tokens are the server's limits.",
    ),
)
