"""Flags of other engines that mean nothing here, and what to say instead: refused with our name for the thing, because a
flag that is quietly taken for another one surprises somebody.

Names as of vLLM 0.33 (with older ones that scripts still carry), SGLang 0.5, text-generation-launcher 3 and the servers of
llama.cpp and lmdeploy in 2026. A flag of ours is never listed; what vLLM's command lines carry without effect is in
known_flags.py. A name that ends in `*` stands for all that begin so; a whole name comes before it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

VLLM: Final = "vLLM"
SGLANG: Final = "SGLang"
TGI: Final = "text-generation-launcher"
LLAMA_CPP: Final = "llama.cpp"
LMDEPLOY: Final = "lmdeploy"

_MODEL = "MODEL as the first argument"
_PROXY = "TLS, CORS and paths are for a proxy in front of the server"
_REQUEST = "a request says it, or --override-generation-config sets the default"
_ONE_DEVICE = "there is one device in this version; leave it out"
_GRAPHS = "graphs follow from --max-graph-tokens, and nothing else is compiled ahead; leave it out"
_NO_DRAFTS = "speculative decoding is not in this version yet; leave it out, the answers are the same"
_NO_ADAPTERS = "serving adapters is not in this version yet; merge the adapter into the model and serve that"
_NO_IMAGES = "only text is served in this version; leave it out"
_NO_STATE = "models with state instead of attention are not served in this version; leave it out"
_NO_EXPERTS = "there is one way of running experts in this version; leave it out"
_NO_TIER = "a tier of host memory is not in this version yet; leave it out"
_NO_SPLIT = "splitting prefill from decode over servers is not in this version yet; leave it out"
_NO_DIFFUSION = "diffusion language models are not served in this version; leave it out"
_KERNELS = "kernels are plugins: --plugin kernels.OP=NAME, --plugin attention=NAME"
_GRAMMARS = "structured output is not in this version yet; leave it out"
_LOADING = "a loader reads weights its own way (--load-format picks one); leave it out"
_WATERMARK = "tokens are not watermarked; leave it out"
_TOKENIZING = "the tokenizer runs in the server's process; leave it out"
_METRICS = "metrics are always served at /metrics, under --metrics-namespace; leave it out"
_ROPE = "the model's config says how positions are scaled; edit its config.json"
_DEBUGGING = "a tool for that engine's own insides; leave it out"

_Table = tuple[tuple[str, str], ...]

# What the flag is called here: (names there, name here).
RENAMED: Final[Mapping[str, _Table]] = {
    VLLM: (
        ("--model-tag", _MODEL),
        ("--tokenizer-revision --code-revision --hf-config-path", "--revision, or a folder that holds the right files"),
        ("--hf-token", "HF_TOKEN in the environment"),
        ("--logits-processors", "--plugin logits_processor=NAME"),
        ("--scheduler-cls", "--plugin scheduler=NAME, or a file: --plugin ./my_scheduler.py"),
        ("--worker-cls --worker-extension-cls", "--plugin executor=NAME"),
        ("--attention-config -ac", "--plugin attention=NAME,OPTION=VALUE"),
        ("--quantization-config", "--quantization"),
        ("--tool-parser-plugin", "--plugin ./my_parser.py"),
        ("--uvicorn-log-level", "--log-level"),
        ("--max-num-scheduled-tokens", "--max-num-batched-tokens"),
        ("--max-num-queued-tokens", "--max-num-queued-reqs"),
        ("--num-gpu-blocks", "--num-gpu-blocks-override"),
        ("--engine-use-ray --worker-use-ray", "--distributed-executor-backend"),
        ("--max-cudagraph-capture-size", "--max-graph-tokens"),
        ("--max-context-len-to-capture", "--max-model-len; --max-graph-tokens says what is captured"),
    ),
    SGLANG: (
        ("--model-path", _MODEL),
        ("--tokenizer-path", "--tokenizer"),
        ("--context-length --context-bucket", "--max-model-len"),
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        ("--max-running-requests", "--max-num-seqs"),
        ("--max-queued-requests", "--max-num-queued-reqs"),
        ("--chunked-prefill-size --max-prefill-tokens", "--max-num-batched-tokens"),
        ("--max-total-tokens", "--kv-cache-memory-bytes or --num-gpu-blocks-override"),
        ("--schedule-policy", "--scheduling-policy"),
        ("--enable-priority-scheduling", "--scheduling-policy priority"),
        ("--retraction-policy", "--plugin victim=NAME"),
        ("--page-size", "--block-size"),
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        ("--disable-overlap-schedule", "--no-async-scheduling"),
        ("--disable-cuda-graph --disable-prefill-cuda-graph --disable-decode-cuda-graph", "--enforce-eager"),
        ("--enable-deterministic-inference", "--deterministic"),
        ("--tp --tp-size", "--tensor-parallel-size"),
        ("--pp-size", "--pipeline-parallel-size"),
        ("--dp --dp-size", "--data-parallel-size"),
        ("--random-seed", "--seed"),
        ("--log-requests --log-requests-level", "--enable-log-requests"),
        ("--log-level-http", "--log-level"),
        ("--admin-api-key", "--admin-key"),
        ("--sampling-defaults", "--generation-config"),
        ("--preferred-sampling-params", "--override-generation-config"),
        ("--decode-attention-backend --prefill-attention-backend --mm-attention-backend", "--attention-backend"),
    ),
    TGI: (
        ("--model-id", _MODEL),
        ("--hostname", "--host"),
        ("--quantize", "--quantization"),
        ("--num-shard --sharded", "--tensor-parallel-size"),
        ("--max-concurrent-requests", "--max-num-queued-reqs and --max-num-seqs"),
        ("--max-batch-size", "--max-num-seqs"),
        ("--max-input-tokens --max-input-length --max-total-tokens", "--max-model-len"),
        ("--max-batch-prefill-tokens", "--max-num-batched-tokens"),
        ("--max-batch-total-tokens", "--kv-cache-memory-bytes or --num-gpu-blocks-override"),
        ("--cuda-memory-fraction", "--gpu-memory-utilization"),
        ("--max-top-n-tokens", "--max-logprobs"),
        ("--payload-limit", "--max-request-bytes"),
        ("--max-client-batch-size", "--max-requests-per-call"),
        ("--max-best-of", "--max-requests-per-call"),
        ("--graceful-termination-timeout -g", "--shutdown-timeout"),
        ("--huggingface-hub-cache --weights-cache-override", "HF_HOME in the environment"),
        ("--tokenizer-config-path", "--tokenizer"),
        ("--json-output", "--log-format json"),
    ),
    LLAMA_CPP: (
        ("-m", "MODEL as the first argument, as in ./model.gguf"),
        ("-hf -hfr --hf-repo -hff --hf-file", "MODEL as the first argument, as in ORG/NAME:Q4_K_M"),
        ("-hft", "HF_TOKEN in the environment"),
        ("-mu --model-url -dr --docker-repo", "MODEL as the first argument: a file, a folder or a hub repository"),
        ("-c --ctx-size --kv-unified-per-slot -fitc --fit-ctx", "--max-model-len"),
        ("-np --parallel", "--max-num-seqs"),
        ("-b --batch-size -ub --ubatch-size", "--max-num-batched-tokens"),
        ("-a --alias", "--served-model-name"),
        ("-ctk --cache-type-k -ctv --cache-type-v", "--kv-cache-dtype"),
        ("--no-cache-prompt", "--no-enable-prefix-caching"),
        ("--cache-prompt", "--enable-prefix-caching, which is on"),
        ("--chat-template-file", "--chat-template, which takes a file as well"),
        ("--api-key-file", "--api-key, or HOTSWAP_API_KEY in the environment"),
        ("-s", "--seed"),
        ("--offline", "HF_HUB_OFFLINE=1 in the environment"),
        ("-v --verbose --log-verbose", "--log-level debug"),
        ("-lv --verbosity --log-verbosity", "--log-level"),
        ("--log-jsonl", "--log-format json"),
        ("-cl --cache-list", "the command `hotswap list`"),
        ("-sm --split-mode -ts --tensor-split", "--tensor-parallel-size"),
        ("-fa --flash-attn", "--attention-backend"),
        ("-fit --fit -fitt --fit-target", "--max-model-len auto, the default: what fits is served"),
    ),
    LMDEPLOY: (
        ("--server-name", "--host"),
        ("--server-port", "--port"),
        ("--api-keys", "--api-key"),
        ("--model-name", "--served-model-name"),
        ("--session-len", "--max-model-len"),
        ("--max-batch-size --max-concurrent-requests", "--max-num-seqs"),
        ("--cache-max-entry-count", "--gpu-memory-utilization"),
        ("--cache-block-seq-len --kernel-block-size", "--block-size"),
        ("--quant-policy", "--kv-cache-dtype"),
        ("--model-format --quant-dtype", "--quantization"),
        ("--max-prefill-token-num --num-tokens-per-iter", "--max-num-batched-tokens"),
        ("--tp", "--tensor-parallel-size"),
        ("--dp", "--data-parallel-size"),
        ("--eager-mode", "--enforce-eager"),
        ("--disable-metrics", "nothing: /metrics is behind --api-key unless --metrics-public"),
        ("--backend", "--plugin, which picks each part by itself"),
    ),
}

# What has no counterpart here: (names there, why, and what to do).
MEANINGLESS: Final[Mapping[str, _Table]] = {
    VLLM: (
        (
            "--max-seq-len-to-capture --cuda-graph-sizes --cudagraph-* --compilation-config "
            "-cc -O -O0 -O1 -O2 -O3 --optimization-level --performance-mode --use-tqdm-on-load --kernel-config",
            _GRAPHS,
        ),
        ("--data-parallel-* -dpa -dpb -dpe -dph -dpm -dpn -dpp --dp-*", "replicas are for a balancer in front"),
        ("-n -r", "one host: --nnodes and --node-rank have nothing to say; leave it out"),
        ("--master-addr --master-port --ray-workers-use-nsight --distributed-timeout-seconds", _ONE_DEVICE),
        ("--dcp-* --cp-* --dbo-* --enable-dbo --ubatch-size --numa-bind* --device-ids --disable-nccl-*", _ONE_DEVICE),
        (
            "--enable-eplb --eplb-* --all2all-backend --expert-placement-strategy --moe-backend --elastic-ep-*",
            _NO_EXPERTS,
        ),
        ("--enable-elastic-ep --enable-ep-weight-filter --linear-backend --enable-moe-shared-loras", _NO_EXPERTS),
        ("--guided-decoding-backend --guided-decoding-* --structured-outputs-config", _GRAMMARS),
        ("--num-lookahead-slots --use-v2-block-manager --ngram-prompt-lookup-* --typical-acceptance-*", _NO_DRAFTS),
        ("--spec-decoding-acceptance-method --disable-logprobs-during-spec-decoding", _NO_DRAFTS),
        ("--speculative-*", _NO_DRAFTS),
        ("--fully-sharded-loras --lora-* --long-lora-scaling-factors --default-mm-loras --max-lora-*", _NO_ADAPTERS),
        ("--enable-lora-bias --specialize-active-lora --enable-tower-connector-lora --qlora-*", _NO_ADAPTERS),
        ("--enable-mixed-moe-lora-format --enable-prompt-adapter --max-prompt-adapters", _NO_ADAPTERS),
        ("--mm-* --media-io-kwargs --allowed-media-domains --allowed-local-media-path --video-*", _NO_IMAGES),
        (
            "--disable-mm-preprocessor-cache --interleave-mm-strings --skip-mm-profiling --language-model-only",
            _NO_IMAGES,
        ),
        ("--disable-chunked-mm-input --trust-request-mm-kwargs", _NO_IMAGES),
        ("--mamba-* --enable-mamba-* --gdn-* --kda-* --use-replayssm --replayssm-* --diffusion-config -dc", _NO_STATE),
        ("--kv-offloading-* --offload-* --cpu-offload-params --kv-sharing-fast-prefill", _NO_TIER),
        ("--ec-* --weight-transfer-config --aux-output-config --engram-config", _NO_SPLIT),
        ("--ssl-* --enable-ssl-refresh --allow-credentials --allowed-* --root-path --middleware --uds", _PROXY),
        ("--h11-* --sse-keep-alive-interval --grpc --grpc-port --disable-frontend-multiprocessing", _PROXY),
        (
            "--show-hidden-metrics-for-version --kv-cache-metrics* --enable-mfu-metrics --custom-histogram-buckets",
            _METRICS,
        ),
        ("--enable-per-request-metrics --per-request-spec-decode-metrics --enable-server-load-tracking", _METRICS),
        ("--enable-force-include-usage", "a request says it: stream_options {include_usage: true}"),
        ("--return-tokens-as-token-ids", "a request says it, with the field of that name"),
        ("--default-chat-template-kwargs", "a request says it, with chat_template_kwargs"),
        ("--exclude-tools-when-tool-choice-none --tool-server --tool-strict-level", "a request's `tools` say it"),
        ("--reasoning-config --reasoning-parser-plugin --reasoning-effort-map", "the answer's text is left whole"),
        ("--enable-tokenizer-info-endpoint --tokens-only --enable-scale-out", "POST /tokenize is what there is"),
        ("--hf-overrides --rope-scaling --rope-theta --model-class-overrides --disable-sliding-window", _ROPE),
        (
            "--pooler-config --override-pooler-config --io-processor-plugin",
            "pooling models are not in this version yet",
        ),
        (
            "--calculate-kv-scales --kv-cache-dtype-* --quantization-param-path",
            "the KV cache has the model's data type",
        ),
        ("--prefix-caching-hash-algo", "block keys are SHA-256 with a random seed; leave it out"),
        (
            "--prefix-cache-* --prefix-match-unit",
            "blocks are kept until memory is needed, oldest use first; leave it out",
        ),
        ("--model-loader-extra-config --pt-load-map-location --safetensors-* --ignore-patterns", _LOADING),
        ("--max-parallel-loading-workers --allow-deprecated-quantization", _LOADING),
        ("--renderer-num-workers --tokenizer-pool-* --enable-shm-tensor-arena", _TOKENIZING),
        ("--watermark --watermark-config", _WATERMARK),
        (
            "--logging-config --log-config-file --enable-logging-iteration-details",
            "--log-level and --log-format say it",
        ),
        (
            "--enable-log-deltas --log-error-stack --aggregate-engine-logging",
            "--log-level says it; text is never logged",
        ),
        (
            "--preemption-check-period --max-long-partial-prefills --scheduler-* --max-paddings",
            "the policy decides that",
        ),
        ("--prefill-schedule-interval --multi-step-stream-outputs --max-num-active-seqs", "the policy decides that"),
        ("--disable-async-output-proc --profiler-config --jit-monitor-* --enable-layerwise-nvtx-tracing", _DEBUGGING),
        ("--additional-config --enable-trace-replay --fail-on-environ-validation --watchdog-config", _DEBUGGING),
    ),
    SGLANG: (
        ("--cuda-graph-* --disable-cuda-graph-padding --enable-torch-compile* --torch-compile-*", _GRAPHS),
        (
            "--disable-piecewise-cuda-graph --enable-profile-cuda-graph --enable-cudagraph-gc --skip-server-warmup",
            _GRAPHS,
        ),
        (
            "--schedule-conservativeness --num-continuous-decode-steps --scheduler-recv-interval",
            "the policy decides that",
        ),
        ("--enable-mixed-chunk --enable-dynamic-chunking", "prefill and decode share every step; leave it out"),
        ("--prefill-* --enable-prefill-delayer --min-free-slots-delay", "the policy decides that"),
        (
            "--priority-* --schedule-low-priority-values-first --default-priority-value",
            "--scheduling-policy priority says it",
        ),
        ("--disable-priority-preemption --abort-on-priority-when-disabled", "--plugin victim=NAME picks who yields"),
        ("--radix-* --enable-session-radix-cache --disable-chunked-prefix-cache", "blocks are kept until needed"),
        ("--enable-hierarchical-cache --enable-hicache --hicache-* --enable-lmcache --lmcache-*", _NO_TIER),
        ("--enable-flexkv --flexkv-* --enable-unified-*", _NO_TIER),
        ("--offload-* --enable-memory-saver --enable-weights-cpu-backup", _NO_TIER),
        (
            "--disaggregation-* --enable-pdmux --pdmux-* --encoder-* --language-only --num-reserved-decode-tokens",
            _NO_SPLIT,
        ),
        ("--speculative-* --enable-multi-layer-eagle --decoupled-spec-* --spec-*", _NO_DRAFTS),
        ("--lora-* --max-loras-per-batch --max-loaded-loras --enable-lora-overlap-loading --max-lora-*", _NO_ADAPTERS),
        ("--grammar-backend --constrained-json-*", _GRAMMARS),
        ("--sampling-backend --linear-attn-* --triton-attention-* --dsa-* --fp8-gemm-* --fp4-gemm-*", _KERNELS),
        ("--bf16-gemm-* --enable-flashinfer-* --disable-flashinfer-* --flashinfer-*", _KERNELS),
        ("--moe-* --ep --ep-* --expert-* --eplb-* --deepep-* --init-expert-location --kt-*", _NO_EXPERTS),
        ("--enable-deepep-moe --disable-shared-experts-fusion --enable-ep-moe --expert-parallel-size", _NO_EXPERTS),
        ("--mamba-* --max-mamba-cache-size --dllm-* --enable-linear-replayssm*", _NO_STATE),
        ("--enable-multimodal --mm-* --limit-mm-data-per-request --disable-fast-image-processor", _NO_IMAGES),
        ("--image-processor-backend --enable-prefix-mm-cache --keep-mm-feature-on-device", _NO_IMAGES),
        ("--dist-init-addr --nccl-* --dist-timeout --base-gpu-id --gpu-id-step --load-balance-method", _ONE_DEVICE),
        (
            "--enable-dp-* --attn-* --dcp-size --enable-p2p-check --pp-max-micro-batch-size --enable-mscclpp",
            _ONE_DEVICE,
        ),
        ("--enable-nccl-* --enable-symm-mem --enable-two-batch-overlap --tbo-* --numa-node --use-ray", _ONE_DEVICE),
        ("--enable-metrics --enable-metrics-for-all-schedulers --bucket-* --collect-tokens-histogram", _METRICS),
        ("--prompt-tokens-buckets --generation-tokens-buckets --enable-cache-report --decode-log-interval", _METRICS),
        ("--enable-trace --export-metrics-* --crash-dump-folder --show-time-cost", _DEBUGGING),
        ("--kv-canary* --debug-* --watchdog-timeout --soft-watchdog-timeout --gc-threshold", _DEBUGGING),
        ("--is-embedding", "embedding models are not in this version yet"),
        ("--json-model-override-args --hf-chat-template-name --completion-template --model-config-parser", _ROPE),
        ("--allow-auto-truncate", "a request says it, with truncate_prompt_tokens"),
        ("--enable-custom-logit-processor", "--plugin logits_processor=NAME: requests bring no code"),
        (
            "--tokenizer-worker-num --detokenizer-worker-num --tokenizer-backend --enable-tokenizer-batch-encode",
            _TOKENIZING,
        ),
        ("--enable-dynamic-batch-tokenizer --dynamic-batch-*", _TOKENIZING),
        ("--weight-* --startup-weight-* --modelopt-* --remote-instance-* --checkpoint-engine-*", _LOADING),
        ("--model-checksum --custom-weight-loader", _LOADING),
        ("--fastapi-root-path --smg-* --grpc-mode --enable-http2 --ssl-*", _PROXY),
        ("--file-storage-path --warmups --enable-response-store --enable-streaming-session", _DEBUGGING),
    ),
    TGI: (
        ("--validation-workers", _TOKENIZING),
        ("--speculate", _NO_DRAFTS),
        ("--lora-adapters", _NO_ADAPTERS),
        ("--disable-grammar-support", "a request that brings none is served without one; leave it out"),
        ("--max-stop-sequences", "a request may have as many as it needs; leave it out"),
        ("--waiting-served-ratio --max-waiting-tokens", "the policy decides that: --scheduling-policy"),
        ("--cuda-graphs --disable-custom-kernels", _GRAPHS),
        ("--rope-scaling --rope-factor", _ROPE),
        ("--prometheus-port", "/metrics is served on --port; leave it out"),
        ("--shard-uds-path --master-addr --master-port", _ONE_DEVICE),
        ("--otlp-endpoint --otlp-service-name", "--otlp-traces-endpoint is not in this version yet; scrape /metrics"),
        ("--cors-allow-origin --ngrok --ngrok-*", _PROXY),
        ("--watermark-gamma --watermark-delta", _WATERMARK),
        ("--usage-stats", "nothing is sent home; leave it out"),
        ("--enable-prefill-logprobs", "a request says it, with prompt_logprobs"),
        ("--env -e", "`hotswap version` and `hotswap plugins` say what is installed"),
    ),
    LLAMA_CPP: (
        (
            "-t --threads -tb --threads-batch -C -Cr --cpu-* --prio* --poll*",
            "OMP_NUM_THREADS in the environment says it",
        ),
        (
            "-ngl --gpu-layers --n-gpu-layers -ncmoe --n-cpu-moe -cmoe -ot --override-tensor",
            "a model is on one device whole",
        ),
        ("-mg --main-gpu -dev --list-devices --rpc --numa -kvo -nkvo --kv-offload --no-kv-offload", _ONE_DEVICE),
        ("-n --predict --n-predict --temp --temperature --top-k --top-p --min-p --top-nsigma --samplers", _REQUEST),
        ("--repeat-penalty --presence-penalty --frequency-penalty --ignore-eos --logit-bias -l", _REQUEST),
        ("--repeat-last-n --typical --typical-p --xtc-* --dry-* --mirostat* --dynatemp-* --adaptive-*", _REQUEST),
        ("--chat-template-kwargs --reasoning --reasoning-* -rea", "a request says it, with chat_template_kwargs"),
        ("--grammar --grammar-file -j --json-schema -jf --json-schema-file", _GRAMMARS),
        ("--spec-* --draft* -md --model-draft -lcs -lcd --lookup-cache-*", _NO_DRAFTS),
        ("--lora --lora-scaled --control-vector*", _NO_ADAPTERS),
        ("-mm --mmproj* -mmu --no-mmproj* --image-* --video-* --media-path", _NO_IMAGES),
        ("--mlock --mmap --no-mmap -lm --load-mode --no-repack --repack --check-tensors --override-kv", _LOADING),
        ("--warmup --no-warmup", _GRAPHS),
        ("-cb --cont-batching -nocb --no-cont-batching", "batching is always continuous; leave it out"),
        (
            "-kvu --kv-unified -no-kvu --no-kv-unified --swa-full -ctxcp --ctx-checkpoints",
            "blocks are shared by all requests",
        ),
        (
            "--cache-reuse --cache-ram -cram --slot-save-path --slots --no-slots",
            "blocks of equal prefixes are shared anyway",
        ),
        ("--context-shift --no-context-shift --keep", "a request ends at the window; leave it out"),
        ("--jinja --no-jinja", "templates are always Jinja; leave it out"),
        ("--metrics", _METRICS),
        (
            "--props --ui* --webui* --no-ui --no-webui --path --tools --tools-* --mcp-* -ag --agent",
            "only the API is served",
        ),
        ("--embedding --embeddings --rerank --reranking --pooling", "embedding models are not in this version yet"),
        ("--rope-scaling --rope-scale --rope-freq-* --yarn-*", _ROPE),
        ("--ssl-key-file --ssl-cert-file --cors-* --api-prefix --reuse-port --threads-http -to --timeout", _PROXY),
        ("--models-dir --models-*", "a server has one model; start one for each, on its own --port"),
        ("--special -sp", "a request says it, with skip_special_tokens"),
        (
            "--log-disable --log-file --log-colors --log-prefix --log-timestamps",
            "logs go to standard error: redirect it",
        ),
    ),
    LMDEPLOY: (
        ("--adapters", _NO_ADAPTERS),
        ("--rope-scaling-factor --use-logn-attn --hf-overrides", _ROPE),
        ("--speculative-algorithm --speculative-*", _NO_DRAFTS),
        ("--vision-max-batch-size --language-model-only", _NO_IMAGES),
        ("--allow-origins --allow-methods --allow-headers --ssl --proxy-url", _PROXY),
        ("--role --migration-backend --migration-*", _NO_SPLIT),
        ("--ep --enable-eplb --enable-microbatch", _NO_EXPERTS),
        ("--dllm-*", _NO_DIFFUSION),
        ("--communicator --cp --dist-init-addr --dp-rank", _ONE_DEVICE),
        ("--cudagraph-capture-batch-sizes", _GRAPHS),
        ("--max-prefill-iters --prefix-cache-*", "the policy decides that: --scheduling-policy"),
        (
            "--allow-terminate-by-client --enable-abort-handling",
            "a client that disconnects ends its request; leave it out",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of another engine. here: our name for it, or a sentence when `renamed` is False."""

    engine: str
    flag: str
    here: str
    renamed: bool


@functools.cache
def foreign_flags() -> tuple[ForeignFlag, ...]:
    """Every entry, engine by engine."""
    return tuple(_entries(RENAMED, True)) + tuple(_entries(MEANINGLESS, False))


def _entries(tables: Mapping[str, _Table], renamed: bool) -> Iterator[ForeignFlag]:
    for engine, table in tables.items():
        for names, here in table:
            for flag in names.split():
                yield ForeignFlag(engine, flag, here, renamed)


def find_foreign(flag: str) -> list[ForeignFlag]:
    """What other engines mean by a flag, at most one entry for each; empty when none has it."""
    found: dict[str, ForeignFlag] = {}
    for exact in (True, False):
        for entry in foreign_flags():
            matches = entry.flag == flag if exact else entry.flag[-1] == "*" and flag.startswith(entry.flag[:-1])
            if matches:
                found.setdefault(entry.engine, entry)
        if found:
            break
    return list(found.values())


def describe_foreign(flag: str) -> str | None:
    """What to say about a flag that is another engine's; None when nobody has it."""
    engines: dict[str, list[str]] = {}
    for entry in find_foreign(flag):
        engines.setdefault(f"here it is {entry.here}" if entry.renamed else entry.here, []).append(entry.engine)
    if not engines:
        return None
    if len(engines) == 1:
        ((here, names),) = engines.items()
        return f"{here} (a flag of {' and '.join(names)})"
    return "; ".join(f"for {' and '.join(names)}'s flag of that name, {here}" for here, names in engines.items())
