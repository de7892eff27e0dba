#!/bin/sh
# Sets up .venv (see tools/setup/install.py). Runs before any Python is known to work, so it is plain sh: it tries
# each candidate by running it, because a pyenv shim exists even where the version behind it does not.
here=$(cd "${0%/*}" && pwd) || exit 2

usable() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' >/dev/null 2>&1; }

# A finished environment brings its own interpreter, which makes a second run quick.
if [ -f "$here/../.venv/setup-stamp" ] && usable "$here/../.venv/bin/python"; then
    exec "$here/../.venv/bin/python" "$here/setup/install.py" "$@"
fi
for candidate in python3.12 python3.13 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python3 \
    "$HOME"/.pyenv/versions/3.1[23].*/bin/python3 "$HOME"/.local/share/uv/python/cpython-3.1[23].*/bin/python3; do
    if usable "$candidate"; then
        exec "$candidate" "$here/setup/install.py" "$@"
    fi
done
echo "set-up: found no Python 3.12 or 3.13 with venv and ensurepip on PATH or under ~/.pyenv/versions; install one and run this again" >&2
exit 2
