#!/bin/sh
unhex='import sys; sys.stdout.buffer.write(bytes.fromhex(sys.stdin.read()))'
python3 -c "$unhex" < message | base64 -d | gzip -d | base64 -d | gzip -d | python3 -c "$unhex" | base64 -d > plain.txt
