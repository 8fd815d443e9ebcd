#!/bin/sh
right=no
[ "$(cat /app/plain.txt)" = 'The blue heron waits beside the seventh lock.' ] && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
