#!/bin/sh
# python.sh PYTHON ARGUMENT...: runs the Python that scripts/test.sh gave the packages which tests need, else PYTHON.
python=$1
shift
with_packages=$(dirname "$0")/../../.deps/python/bin/python
if [ -x "$with_packages" ]; then python=$with_packages; fi
exec "$python" "$@"
