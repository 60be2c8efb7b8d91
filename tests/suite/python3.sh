#!/bin/sh
# Stands for Python where tests need none: does what AS_PYTHON says with the paths old and new.
old=$3 new=$4
eval "$AS_PYTHON"
