#!/usr/bin/env bash
# How much faster K = 2 processes train than one, one thread each: interleaved in one go, because machines are noisy.
#   launch/scaling.sh [ROUNDS] [adl-dist train settings ...]
set -euo pipefail
rounds=${1:-3}
shift || true
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

measure() { # K round
    adl-dist train model=resnet18 data=synthetic data.num_samples=1536 data.num_validation=1 train.batch_size=128 \
        train.epochs=1 runtime.threads=1 runtime.tensorboard=false "partition.num_stages=$1" \
        "run_dir=$folder/k$1-$2" "${@:3}" >/dev/null
}
for round in $(seq "$rounds"); do
    measure 1 "$round" "${@:2}"
    measure 2 "$round" "${@:2}"
done
python - "$folder" "$rounds" <<'PY'
import json, pathlib, statistics, sys

folder, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rate = {k: [json.loads((folder / f"k{k}-{r}" / "summary.json").read_text())["samples_per_second"]
            for r in range(1, rounds + 1)] for k in (1, 2)}
ratios = [b / a for a, b in zip(rate[1], rate[2])]
for k in (1, 2):
    print(f"K = {k}: {statistics.median(rate[k]):6.1f} images/s   ({', '.join(f'{r:.1f}' for r in rate[k])})")
print(f"ratio: {statistics.median(ratios):6.2f}          ({', '.join(f'{r:.2f}' for r in ratios)})")
stages = json.loads((folder / "k2-1" / "summary.json").read_text())["stages"]
print("busy:  " + ", ".join(f"stage {s['stage']} {s['busy_share']:.0%}" for s in stages))
PY
