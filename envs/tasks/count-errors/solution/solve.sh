#!/bin/sh
awk '$3 == "ERROR"' server.log | wc -l > answer.txt
