#!/usr/bin/env bash
# From nothing to a comparison: environment, corpus, tokenizer, rows, trainings, samples, report.
#   bash speedrun.sh                       CPU: a small looped model with both input gains and its flat twin, on the
#                                               source of Python's library; minutes, offline
#                                          GPUs: the 140M recipe on 11.2B tokens of FineWeb-Edu, on all of them
#   DATA=my/texts bash speedrun.sh         your own .parquet (column text), .jsonl (key text) or .txt files
#   bash speedrun.sh setup                 the environment only
# Run again, it continues where it stopped: finished stages are skipped, training resumes.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")"
case "${1:-}" in
"" | setup) ;;
*) sed -n '2,8s/^# \{0,1\}//p' speedrun.sh; exit 2 ;;
esac
# seconds that torchrun's ranks get to save before they are killed; its own 30 are too few for a large checkpoint
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$GPUS" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    GPUS=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[0-9GM]' || true) # indices or names
fi
PRESET=${PRESET:-$([ "$GPUS" -gt 0 ] && echo parcae-140m || echo nano)} # network and recipe: nano, parcae-…
DATA=${DATA:-$([ "$GPUS" -gt 0 ] && echo fineweb-edu || echo stdlib)}   # stdlib, fineweb-edu, or a folder of texts
ARMS=${ARMS:-$([ "$GPUS" -gt 0 ] && echo euler zoh || echo euler flat zoh)} # a training each, matched in all else; flat: no loop
TOKENS=${TOKENS:-}                                                      # of each training (default: the preset's)
NPROC=${NPROC:-$((GPUS > 0 ? GPUS : 1))}                                # processes of a training: one a GPU
JOBS=${JOBS:-$([ "$GPUS" -gt 0 ] && echo 1 || getconf _NPROCESSORS_ONLN)} # trainings side by side, on a CPU a core each
SEED=${SEED:-0}                                                         # of weights, row order, depths, initial states
RUN=${RUN:-$PRESET-$(basename -- "$DATA")-s$SEED}                       # results go to runs/$RUN
LONG_DOCS=${LONG_DOCS:-$([ "$GPUS" -gt 0 ] && echo crop || echo split)} # crop: the paper's, but with short rows it drops most of the text
BUNDLE=${BUNDLE:-}                                                      # CORE task data: zip or folder (default: fetch)
PROMPT=${PROMPT:-$([ "$DATA" = stdlib ] && echo 'def ' || echo The)}    # what the samples at the end begin with
PY=${PY:-}                                                              # Python with the dependencies (default: .venv)

for name in JOBS NPROC; do
    [[ ${!name} =~ ^[1-9][0-9]{0,5}$ ]] || { echo "error: $name=${!name} is not a whole number from 1 on" >&2; exit 2; }
done

twice=$(tr ' ' '\n' <<<"$ARMS" | sort | uniq -d)
[ -n "${ARMS// /}" ] || { echo "error: ARMS is empty; give euler, zoh, flat or several of them" >&2; exit 2; }
[ -z "$BUNDLE" ] || [ -e "$BUNDLE" ] || { echo "error: BUNDLE=$BUNDLE is not there" >&2; exit 2; }
[[ $LONG_DOCS =~ ^(crop|split)$ ]] || { echo "error: LONG_DOCS=$LONG_DOCS is not crop or split" >&2; exit 2; }
[ -z "$(echo $twice)" ] || { echo "error: ARMS=$ARMS has $(echo $twice) twice" >&2; exit 2; }

say() { printf '\n[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

if [ -z "$PY" ]; then
    PY=.venv/bin/python
    if ! cmp -s pyproject.toml .venv/pyproject.toml; then
        for base in python3 python3.13 python3.12 python3.11 none; do
            "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && break
        done
        [ "$base" = none ] && { echo "error: no Python 3.11 to 3.13 on the PATH; install one" >&2; exit 2; }
        say "environment: .venv with the versions pinned in pyproject.toml"
        "$base" -m venv .venv
        "$PY" -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*p["dependencies"], *sum(p["optional-dependencies"].values(), []), sep="\n")' >.venv/requirements.txt
        "$PY" -m pip install --quiet --disable-pip-version-check --requirement .venv/requirements.txt
        cp pyproject.toml .venv/pyproject.toml
    fi
fi
[ "${1:-}" = setup ] && exit 0

# refuse now what the trainings or the machine would refuse later
read -r VOCAB SEQ RECIPE_TOKENS < <("$PY" -c '
import sys, torch, train
preset, tokens, arms, gpus, processes, seed = sys.argv[1:]
c = train.PRESETS.get(preset) or train.fail(f"PRESET={preset} is not one of {chr(32).join(train.PRESETS)}")
recipe = train.recipe_of(preset)
try:
    tokens = int(float(tokens or recipe.tokens))
except (ValueError, OverflowError):
    train.fail(f"TOKENS={tokens} is not a number of tokens")
if int(gpus) and not torch.cuda.is_available():
    train.fail("nvidia-smi shows GPUs that torch cannot use; update the driver, or hide them: CUDA_VISIBLE_DEVICES=")
if recipe.batch_size % int(processes):
    fits = max(n for n in range(1, int(processes)) if recipe.batch_size % n == 0)
    train.fail(f"NPROC={processes} does not divide the batch of {recipe.batch_size} rows; try NPROC={fits}")
for arm in arms.split():
    flat = ["--preset", "transformer-" + preset.removeprefix("parcae-")]
    network = flat if arm == "flat" else ["--preset", preset, "--gain", arm]
    args = train.parse_args([*network, "--seed", seed, "--tokens", str(tokens)])
    train.settle(args, train.model_config(args), recipe, int(processes))
print(c.vocab_size, c.seq_len, tokens)' "$PRESET" "$TOKENS" "$ARMS" "$GPUS" "$NPROC" "$SEED") || exit 2
WORK=data/$(basename -- "$DATA")-v$VOCAB
ROWS=$WORK/rows-$SEQ-$LONG_DOCS
OUT=runs/$RUN
# on exit, ends what runs in the background; trainings first save what they have
trap 'alive=$(jobs -pr); [ -z "$alive" ] || { kill $alive 2>/dev/null; wait; } || true' EXIT
is_alive() { [[ " $(echo $(jobs -pr)) " == *" $1 "* ]]; }

case "$DATA" in
stdlib)
    TEXTS=data/stdlib
    say "corpus: the source of this Python's standard library"
    "$PY" dataloader.py stdlib --out $TEXTS
    ;;
fineweb-edu)
    TEXTS=data/fineweb-edu
    # a shard is about 250M characters, 53M tokens, of which best-fit packing crops up to 40 %
    SHARDS=$((RECIPE_TOKENS / 31000000 + 2))
    [ "$SHARDS" -gt 1822 ] && SHARDS=1822
    # the tokenizer's training reads 2e9 characters, as many as 8 shards hold, but at most 10,000 of a document
    FIRST=$((SHARDS < 12 ? SHARDS : 12))
    say "corpus: for the tokenizer $FIRST of $SHARDS shards of FineWeb-Edu, and the one for validation"
    "$PY" dataloader.py download --out $TEXTS --shards "$FIRST"
    ;;
*)
    TEXTS=$(cd "$DATA" >/dev/null 2>&1 && pwd) ||
        { echo "error: DATA=$DATA is not a folder (nor stdlib, nor fineweb-edu)" >&2; exit 2; }
    ;;
esac
mkdir -p "$WORK" "$OUT"
if [ -f "$WORK/source" ] && [ "$(cat "$WORK/source")" != "$TEXTS" ]; then # another folder of the same last name
    echo "error: $WORK was made from $(cat "$WORK/source"), not $TEXTS; rename one of these folders, or delete" \
        "$WORK/source if it is the same one, moved" >&2
    exit 2
fi
echo "$TEXTS" >"$WORK/source"

if [ ! -f "$WORK/tokenizer.json" ]; then
    say "tokenizer: byte-level BPE with $VOCAB entries"
    "$PY" tokenizer_train.py --texts "$TEXTS" --vocab-size "$VOCAB" --out "$WORK/tokenizer.json"
fi

say "rows: packing $TEXTS into $SEQ + 1 tokens each"
pack=("$PY" dataloader.py pack --texts "$TEXTS" --tokenizer "$WORK/tokenizer.json" --seq-len "$SEQ"
    --long-docs "$LONG_DOCS" --out "$ROWS")
if [ "$DATA" = fineweb-edu ]; then
    say "the rest is fetched and packed while training runs on what is there: $WORK/download.log, $WORK/pack.log"
    "$PY" dataloader.py download --out $TEXTS --shards "$SHARDS" > >(tee "$WORK/download.log" | grep '^error' >&2) 2>&1 &
    nice "${pack[@]}" --stream "$SHARDS" >"$WORK/pack.log" 2>&1 &
    packing=$!
    until [ -f "$ROWS/manifest.json" ] && [ -f "$ROWS/val.npy" ]; do
        is_alive "$packing" || { tail -n 3 "$WORK/pack.log" >&2; exit 1; }
        sleep 5
    done
else
    "${pack[@]}"
fi

launch=("$PY")
# --local-addr: the machine's own name need not resolve, as a Mac's often does not
[ "$NPROC" -gt 1 ] && launch=("$PY" -m torch.distributed.run --standalone --local-addr=localhost "--nproc_per_node=$NPROC")
device=auto
[ "$GPUS" -gt 0 ] || device=cpu # where trainings side by side have a core each
train_arm() { # in the background, for its exec. flat: the network without its loop; else a gain
    local network=(--preset "$PRESET" --gain "$1")
    [ "$1" = flat ] && network=(--preset "transformer-${PRESET#parcae-}")
    exec "${launch[@]}" train.py "${network[@]}" --device "$device" --data "$ROWS" --out "$OUT/$1" --seed "$SEED" --tokens "$RECIPE_TOKENS" --resume
}
arms=()
trainings=()
running() { # how many trainings are not done
    local count=0 pid
    for pid in ${trainings[@]+"${trainings[@]}"}; do is_alive "$pid" && count=$((count + 1)); done
    echo "$count"
}
progress() { # the last line of each training under way
    local i
    for i in "${!trainings[@]}"; do
        is_alive "${trainings[$i]}" || continue
        echo "${arms[$i]##*/}: $(tail -n 1 "${arms[$i]}.txt")"
    done
}
for arm in $ARMS; do
    while [ "$(running)" -ge "$JOBS" ]; do sleep 1; [ $((SECONDS % 60)) -ne 0 ] || progress; done
    arms+=("$OUT/$arm")
    if [ "$JOBS" -gt 1 ]; then
        say "training: $arm on a core of its own, $OUT/$arm.txt"
        OMP_NUM_THREADS=1 train_arm "$arm" >>"$OUT/$arm.txt" 2>&1 &
        trainings+=($!)
    else
        say "training: $arm, $OUT/$arm"
        train_arm "$arm" &
        wait $!
    fi
done
while [ "$(running)" -gt 0 ]; do sleep 1; [ $((SECONDS % 60)) -ne 0 ] || progress; done
for i in ${trainings[@]+"${!trainings[@]}"}; do
    wait "${trainings[$i]}" || { code=$?; tail -n 3 "${arms[$i]}.txt" >&2; exit "$code"; }
    tail -n 1 "${arms[$i]}.txt"
done

failed=0
if [ "$GPUS" -gt 0 ] || [ -n "$BUNDLE" ] || [ -f data/eval_bundle.zip ]; then # on a CPU a reduced panel, a few minutes
    for run in "${arms[@]}"; do
        say "CORE: $run"
        "${launch[@]}" core_eval.py "$run" --device "$device" ${BUNDLE:+--bundle "$BUNDLE"} \
            $([ "$GPUS" -gt 0 ] || echo --max-per-task 20 --seeds 1234) || failed=$?
    done
else
    say "CORE: left out; give its task data as BUNDLE=eval_bundle.zip to evaluate a reduced panel on this CPU"
fi

for run in "${arms[@]}"; do
    say "sample: $run"
    "$PY" -m tools.sample "$run" --device "$device" --prompt="$PROMPT" --max-tokens 64 | tee "$run/sample.txt"
done

say "report"
"$PY" -m tools.report "${arms[@]}" --out "$OUT"
set -- $ARMS
network=(--preset "$PRESET" --gain "$1")
[ "$1" = flat ] && network=(--preset "transformer-${PRESET#parcae-}")
echo "next: change the loop in model.py, then train and compare with the same data and seed:"
echo " $(printf ' %q' "${launch[@]}" train.py "${network[@]}" --device "$device" --data "$ROWS" --seed "$SEED" --tokens "$RECIPE_TOKENS" --out runs/mine)"
echo " $(printf ' %q' "$PY" -m tools.report "$OUT/$1" runs/mine --out runs/mine)"
exit "$failed"
