#!/usr/bin/env bash
# Writes requirements.txt and tools/setup/requirements-cpu.txt from requirements.in (`make lock`).
# Pins already in the files are kept; delete a file first to move everything to the newest versions.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=.venv/bin/uv
compile() {  # OUTPUT [OPTION...]: header comments of requirements.in, then one pin per line
    local output=$1; shift
    local work; work=$(mktemp)
    [ ! -f "$output" ] || sed -E '/^(#|$)/d; s/ ;.*//' "$output" > "$work"
    $uv pip compile -q requirements.in --python-version 3.12 --python-platform x86_64-manylinux_2_36 --no-header \
        --no-annotate --no-emit-index-url --output-file "$work" "$@"
    # outlines-core has no wheel for 3.13; SGLang imports outlines only for `--grammar-backend outlines`.
    { grep '^#' requirements.in; sed -E 's/^outlines(-core)?==.*/& ; python_version < "3.13"/' "$work"; } > "$work.new"
    install -m 644 "$work.new" "$output"
    rm "$work" "$work.new"
}
compile requirements.txt
compile tools/setup/requirements-cpu.txt --override tools/setup/cuda-only.txt -c requirements.txt
