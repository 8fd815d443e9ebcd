#!/bin/sh
cd /app/box || cd /
cat > /logs/expected <<'END'
.
./a
./a/1.txt
./b
./b/2.txt
./b/c
./b/c/3.txt
./b/empty
./nearly.txt
./z z
END
find . | LC_ALL=C sort > /logs/found
right=no
cmp -s /logs/expected /logs/found && [ "$(cat a/1.txt b/2.txt b/c/3.txt nearly.txt)" = "$(printf 'one\ntwo\nthree\none')" ] && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
