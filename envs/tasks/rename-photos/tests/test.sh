#!/bin/sh
cd /app/photos || cd /
cat > /logs/expected <<'END'
./day 1.jpg: photo 1
./day 2.jpg: photo 2
./day 3.jpg: photo 3
./day four.jpg: photo four
./notes.txt: text
./old/beach.jpg: old
END
find . -type f | LC_ALL=C sort | while read -r name; do echo "$name: $(cat "$name")"; done > /logs/found
right=no
cmp -s /logs/expected /logs/found && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
