#!/bin/sh
# Stands in for Python in tests: runs the shell script in AS_PYTHON, which uses the paths $old and $new.
old=$3 new=$4
eval "$AS_PYTHON"
