#!/bin/sh
# Install packages into an environment: install.sh PYTHON REQUIREMENT... (words of `pip install`).
# PyTorch's packages are 5 GB, which uv unpacks with a fifth of pip's processor time. It does not read pip's settings:
# indexes, folders of wheels and certificates are handed to it. Where it fails, pip tries again and says why.
set -eu
python=$1
shift
# One at a time: several targets that make runs at once install into the same environment.
exec 9>"$(dirname "$python")/../install.lock"
flock 9

pip() { "$python" -m pip install --quiet --no-input "$@"; }

# Of the environment, of files for `pip install` alone, of files for all of pip: in pip's order.
settings=$("$python" -m pip config list 2>/dev/null) || settings=
hand_over() {
    for section in :env: install global; do
        value=$(printf '%s\n' "$settings" | sed -n "s/^$section\.$2='\(.*\)'$/\1/p")
        [ -z "$value" ] || { export "$1=$value" && return; }
    done
}
hand_over UV_DEFAULT_INDEX index-url
hand_over UV_INDEX extra-index-url
hand_over UV_FIND_LINKS find-links
hand_over SSL_CERT_FILE cert
hand_over UV_HTTP_TIMEOUT default-timeout
# As pip chooses: the newest version of all indexes.
export UV_INDEX_STRATEGY=unsafe-best-match

uv=$(dirname "$python")/uv
[ -x "$uv" ] || pip uv || true
{ [ -x "$uv" ] && "$uv" pip install --quiet --python "$python" "$@"; } || {
    echo "tests/install.sh: uv cannot install $*: pip tries" >&2
    pip "$@"
}
