#!/bin/sh
find photos -name '*.jpeg' | while read -r name; do mv "$name" "${name%.jpeg}.jpg"; done
