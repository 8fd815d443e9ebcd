#!/bin/sh
right=no
[ "$(tr -d '[:space:]' < /app/answer.txt)" = 45 ] && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
