#!/bin/sh
# backup.sh FROM TO: copies every .txt file of FROM (not of folders in it) into TO, and says how many.
from=$1
to=$2
cd $from
count=0
for file in `ls *.txt`; do
  cp $file $to
  count=$count+1
done
echo $count
