#!/usr/bin/env bash
# scripts/launch/slurm.sh under a real Slurm of one node with two pretended GPUs, on a CPU: a job that is out of time, or cancelled, saves, and
# the next one continues with the numbers of a run that was never stopped. As root, with Debian's munge, slurmctld, slurmd and slurm-client.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d) daemons=()
trap 'kill "${daemons[@]}" 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
chmod 755 "$folder"
export SLURM_CONF=$folder/slurm.conf PYTHONPATH=$PWD OMP_NUM_THREADS=1
echo "NodeName=$(hostname) Name=gpu File=/dev/null,/dev/zero" >"$folder/gres.conf"
cat >"$SLURM_CONF" <<END
ClusterName=one
SlurmctldHost=$(hostname)
SlurmUser=root
AuthInfo=socket=$folder/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
NodeName=$(hostname) Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES State=UP
END
head -c 128 /dev/urandom >"$folder/key" && chmod 600 "$folder/key"
munged --force --foreground --socket "$folder/munge" --key-file "$folder/key" --pid-file "$folder/munged.pid" \
    --log-file "$folder/munged.log" --seed-file "$folder/seed" & daemons+=($!)
until [ -S "$folder/munge" ]; do sleep 0.1; done
slurmctld -D >"$folder/slurmctld.log" 2>&1 & daemons+=($!)
slurmd -D >"$folder/slurmd.log" 2>&1 & daemons+=($!)
until sinfo -h -t idle | grep -q idle; do sleep 0.5; done

python scripts/make_tiny_model.py --out "$folder/model" --hidden 32 --heads 4
cat >"$folder/env.py" <<'END'
def load_tasks(split): return [{"prompt": str(n)} for n in range(64)]
def reward_fn(completion): return sum(map(str.islower, completion)) / 8
END
flags="--model $folder/model --env_path $folder/env.py --max_tokens 8 --tasks_per_step 8 --num_steps 60 --optim.lr 1e-3"
submit() { sbatch --parsable --gpus-per-node 2 --output "$folder/$1.log" scripts/launch/slurm.sh $flags --out "$folder/$1"; }
end_of() { timeout 300 sh -c "until scontrol show job $1 | grep JobState=$2; do sleep 1; done" || tail -n 20 "$folder"/*.log; }
steps_of() { until [ "$(cat "$folder/$1/metrics.jsonl" 2>/dev/null | wc -l)" -ge "$2" ]; do sleep 0.1; done; }

end_of "$(submit whole)" COMPLETED
job=$(submit stopped)
steps_of stopped 4
scancel --batch --signal=USR1 "$job" # as 10 minutes before the time limit
end_of "$job" PENDING
scontrol update job "$job" StartTime=now
steps_of stopped 12
scancel "$job" # as a preemption: SIGTERM, and SIGKILL after KillWait
end_of "$job" CANCELLED
end_of "$(submit stopped)" COMPLETED
grep -E "begins at|saved|^step 60|error" "$folder/stopped.log"
python - "$folder" <<'END'
import json, sys
whole, stopped = ([json.loads(line) for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")] for name in ("whole", "stopped"))
for one, other in zip(whole, stopped, strict=True):
    for name in one.keys() | other.keys():
        assert name.startswith("time/") or one[name] == other[name], (one["step"], name, one.get(name), other.get(name))
print(f"{len(whole)} steps with the same numbers")
END
