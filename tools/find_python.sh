#!/bin/sh
# Print the newest Python here, 3.11 to 3.14, that can make venvs; with an argument such as 3.11, that version only.
want=${1:-}
# A venv's own Python does not count: it goes when the venv is made anew.
probe='import ensurepip, ssl, sys, venv; print(sys.version_info[1] if sys.prefix == sys.base_prefix else 0)'
best='' best_minor=0
for python in python3.14 python3.13 python3.12 python3.11 python3 \
    ${PYENV_ROOT:+"$PYENV_ROOT"/versions/3.*/bin/python3} /usr/bin/python3; do
    minor=$("$python" -c "$probe" 2>/dev/null) || continue
    if [ "$minor" -lt 11 ] || [ "$minor" -gt 14 ]; then continue; fi
    if [ -n "$want" ] && [ "3.$minor" != "$want" ]; then continue; fi
    if [ "$minor" -gt "$best_minor" ]; then best=$python best_minor=$minor; fi
done
if [ -z "$best" ]; then
    echo "wanted: Python ${want:-3.11 to 3.14} with venv; found: none. On Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
fi
command -v "$best"
