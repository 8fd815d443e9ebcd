#!/bin/sh
right=no
[ "$(cat /app/hello.txt)" = hello ] && right=yes
if [ $right = yes ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
