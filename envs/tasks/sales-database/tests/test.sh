#!/bin/sh
right=no
[ "$(cat /app/answer.txt)" = 'plate 54362' ] && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
