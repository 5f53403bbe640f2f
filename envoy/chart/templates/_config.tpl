{{- /*
The filter's configuration, as an object. Nothing in it is evaluated as a template.
*/ -}}
{{- define "meshquota.config" -}}
{{- $config := .Values.config -}}
{{- if kindIs "string" $config -}}
{{- $config = hasPrefix "{" (trim $config) | ternary (fromJson $config) (fromYaml $config) -}}
{{- end -}}
{{- include "meshquota.json" $config -}}
{{- end -}}

{{- /*
JSON that is also YAML. toYaml cannot be used: it leaves a string with a control character out, and all that is around it. JSON
leaves some characters bare that YAML refuses, or takes for the end of a line; they are escaped here.
*/ -}}
{{- define "meshquota.json" -}}
{{- $json := toPrettyJson . -}}
{{- range concat (untilStep 0x7f 0xa0 1) (list 0xfeff 0xfffe 0xffff) -}}
{{- $json = replace (printf "%c" .) (printf "\\u%04x" .) $json -}}
{{- end -}}
{{- $json -}}
{{- end -}}
