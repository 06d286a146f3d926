{{/* Parts that the pods of routers and workers share. Arguments: (dict "root" $ "component" "decode" "of" .Values.decode). */}}

{{/* The variables of a process: settings of all, of its kind, of its own; the narrower wins. */}}
{{- define "baton.settings" -}}
{{- $own := dict "host" "0.0.0.0" "model" .root.Values.model.name "drain_timeout_s" .root.Values.drainTimeoutS "cluster_secret_file" "/etc/baton/cluster/cluster.secret" }}
{{- if .root.Values.tls.existingSecret }}
{{- $_ := merge $own (dict "tls_cert_file" "/etc/baton/tls/tls.crt" "tls_key_file" "/etc/baton/tls/tls.key" "tls_ca_file" "/etc/baton/tls/ca.crt") }}
{{- end }}
{{- $kind := ternary (dict) .root.Values.workerSettings (eq .component "router") }}
{{- range $name, $value := mergeOverwrite (deepCopy $own) (deepCopy .root.Values.settings) (deepCopy $kind) (deepCopy .of.settings) }}
- name: BATON_{{ upper $name }}
  value: {{ if kindIs "float64" $value }}{{ if eq (float64 (int64 $value)) $value }}{{ int64 $value | quote }}{{ else }}{{ $value | quote }}{{ end }}{{ else }}{{ $value | quote }}{{ end }}
{{- end }}
{{- end }}

{{- define "baton.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .root.Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "baton.redisSecret" .root }}, key: password}}
- name: BATON_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "baton.name" .root }}-redis:6379/0
{{- else if .root.Values.redis.urlSecret }}
- name: BATON_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.redis.urlSecret }}, key: url}}
{{- else }}
- name: BATON_REDIS_URL
  value: {{ required "redis.url or redis.urlSecret is needed where redis.enabled is false" .root.Values.redis.url | quote }}
{{- end }}
{{- with .root.Values.model.hubToken }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- include "baton.settings" . }}
{{- with .of.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
# The files of Secrets belong to this group, and others may not read them.
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "baton.mounts" -}}
- {name: tmp, mountPath: /tmp}
- name: models
  mountPath: /var/lib/baton/models
  {{- if .root.Values.model.readOnly }}
  readOnly: true
  {{- end }}
- {name: cluster, mountPath: /etc/baton/cluster, readOnly: true}
{{- if .root.Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
- {name: tmp, emptyDir: {}}
- name: models
  {{- with .root.Values.model }}
  {{- if .existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .existingClaim }}
    readOnly: {{ .readOnly }}
  {{- else if .hostPath }}
  hostPath: {path: {{ .hostPath }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ .sizeLimit }}}
  {{- end }}
  {{- end }}
- name: cluster
  secret: {secretName: {{ include "baton.clusterSecret" .root }}, defaultMode: 0440}
{{- if .root.Values.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ .root.Values.tls.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "baton.scheduling" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "baton.selector" . | nindent 8 }}
{{- end }}
