"""What an image of the CPU may hold: its records by module, their fields, and the kinds of these; see `rlx.tables`.

Fields that are not listed have their defaults.
"""

from __future__ import annotations

from rlx.tables import Schema

__all__ = ["SCHEMA"]

NAMES = {
    "Size": "int|Dim",
    "Shape": "(Size)",
    "Atom": "Symbol|FloorDiv|Extremum",
    "Attribute": "none|bool|int|float|str|DType|Dim|(Attribute)",
    "Argument": "Pointer|Computed|Scratch|ScratchStride|Routine|Link|Size",
    "Function": "Constant|ByThreads|Part|Product|Chosen",  # an int of the extents
    "Cut": "Grid|RowSchedule|LineSchedule|PackSchedule|AttentionSchedule|Int8Schedule|ConvSchedule|"
    "ImplicitGemmSchedule|DepthwiseSchedule|InnerColumns|GroupedMatmulSchedule|MatmulSchedule|InPlaceSchedule|"
    "RecurrenceSchedule|FusedDepthwiseSchedule|WinogradSchedule|ThinSchedule|Choice",
}

RECORDS = """
rlx.ir.shape
    Symbol name:str lo:int hi:int|none multiple:int
    FloorDiv num:Size den:Size
    Extremum kind:str args:Shape
    Dim parts:(Atom|int)
    Guard lhs:Size rhs:Size why:str
rlx.ir.dtype
    DType name:str
rlx.ir.encoding
    Encoding name:str
rlx.ir.value
    TensorType shape:Shape dtype:DType encoding:Encoding|none
(none)
    Array number:int
rlx.ir.graph
    Graph name:str inputs:((str,TensorType)) params:((str,TensorType)) states:((str,TensorType))
        outputs:((str,TensorType)) guards:[Guard] results:((str,str,(str)))
    Node op:str attributes:{str:Attribute} provenance:(str)
rlx.kernels.program
    Buffer name:str kind:str shape:Shape dtype:DType encoding:Encoding|none data:Array|none root:Buffer|none
        offset:Size wide:bool
    Flow name:str round:Symbol|none trips:Size|none count:Symbol|none stacked:(Symbol)
    Mark flow:Flow part:str test:Buffer|none
    Extents sizes:((Symbol,Size|Flow)) checks:(Guard)
rlx.backends.codegen.kernel_facts
    KernelFacts name:str host:Node|none operands:(Buffer) results:(Buffer) mark:Mark|none extents:Extents|none
        makes:(Symbol) role:str shown:(str,str,str,str) read:(Buffer) named:(Buffer) written:(Buffer)
        replaceable:(Buffer) sizes:(str)
rlx.kernels.experts
    ExpertWeight name:str source:Buffer panels:Buffer table:Buffer transposed:bool routine:str
    ExpertLayer name:str experts:int top_k:int rows:Size block:Buffer weights:[ExpertWeight]
rlx.kernels.program
    Program name:str inputs:[Buffer] params:[Buffer] states:[Buffer] constants:[Buffer] prepare:[KernelFacts]
        run:[KernelFacts] outputs:[(str,Buffer)] updates:{str:Buffer} copied:{str:Buffer} dims:{str:Symbol}
        guards:[Guard] made:{str:Size|none} experts:[ExpertLayer]
rlx.plan.interval
    Interval name:str start:int stop:int size:int alignment:int fixed:int|none guard:int space:str
    Placement offsets:(int) height:int method:str bound:int
rlx.plan.arena
    Row name:str type:str start:int stop:int offset:int nbytes:int made_by:str into:str
    Schedule ranges:{Buffer:(int,int)} makers:{Buffer:KernelFacts} operands:{Buffer:(Buffer)} bounds:{str:int}|none
        kernels:(KernelFacts) outside:{Buffer:(int,int)} views:(Buffer)
    MemoryPlan at:{str:int} alignment:int offsets:{Buffer:int} scratch:{int:{str:int}} intervals:(Interval)
        placement:Placement held:((Buffer)) rows:(Row) schedule:(KernelFacts) views:(Buffer) element_width:int|none
rlx.backends.codegen.arguments
    Pointer buffer:Buffer offset:Size
    Computed fn:Function
    Scratch
    ScratchStride
    Routine symbol:str ir:str
    Link flow:Flow what:str
    KernelCode symbol:str ir:str words:(Argument) chunks:Function sites:(str) scratch:Size|Computed optimize:bool
        notes:{str:str}
    Once fn:Cut
    Part cut:Once|Cut name:str index:int|none
    Product sizes:Shape
rlx.backends.codegen.table
    Phase kernel:KernelFacts code:KernelCode|none piece:bool cost:int
rlx.backends.cpu.runtime.image
    Constant value:int
    ByThreads few:int number:int
rlx.backends.cpu.target
    TileTimes split:int square:int pair:int first_pair:int split_few:int beside:int blocks:int gather:int start:int
        start_few:int
    Rates flops:float read:float near:float write:float copy:float gather:float memory:float taps:float transforms:float
        byte_products:float byte_result:float tiles:TileTimes
rlx.backends.cpu.schedule.base
    Grid outer:Shape last:Size weight:Size row_weight:Size whole_rows:bool
    RowSchedule count:Size cost:Size
    LineSchedule lines:Size inner:Size times:Size
    PackSchedule count:Size panels:Size elements:Size together:int|none
rlx.backends.cpu.schedule.choice
    Limit size:Size least:int most:int|none
    Choice ways:((Limit))
    Chosen choice:Once way:int number:Function
rlx.backends.cpu.schedule.attention
    AttentionSchedule q_shape:Shape keys:Size value_depth:Size to_scratch:bool packs:bool causal:bool rates:Rates
        widens:bool ring:bool pairs:int
rlx.backends.cpu.schedule.int8
    Int8Schedule outputs:Size depth:Size pixels:Size groups:int rows:int width:int in_image:Size|none direct:bool
        rates:Rates
rlx.backends.cpu.schedule.conv
    ConvSchedule outputs:Size depth:Size pixels:Size groups:int size:int width:int rows:int in_image:Size|none
        in_place:bool rates:Rates tiles:bool
    ImplicitGemmSchedule sizes:Shape kernel:(Size,Size) strides:(int,int) dilation:int size:int width:int in_image:bool
        in_place:bool rates:Rates groups:int apart:int
rlx.backends.cpu.schedule.depthwise
    DepthwiseSchedule sizes:Shape taps:int lanes:int rates:Rates
    InnerColumns sizes:Shape stride:int dilation:int
rlx.backends.cpu.schedule.grouped_matmul
    GroupedMatmulSchedule rows:Size experts:Size n:Size k:Size size:int rates:Rates decodes:bool
rlx.backends.cpu.schedule.matmul
    MatmulSchedule m:Size n:Size k:Size count:Size size:int shape:Shape to_scratch:bool rates:Rates tiles:bool
        pairs:bool whole:bool few:int|none tiles_from:int records:bool
    InPlaceSchedule product:MatmulSchedule nbytes:int
rlx.backends.cpu.schedule.recurrence
    RecurrenceSchedule steps:Size batch:Size gates:int hidden:int padded:int groups:int at_once:int directions:int
        round_state:bool rates:Rates
rlx.backends.cpu.schedule.fused_depthwise
    FusedDepthwiseSchedule sizes:Shape depth:Size taps:int reach:int stride:int ring:int together:int
        rates:Rates windows:ImplicitGemmSchedule|none
rlx.backends.cpu.schedule.thin
    ThinSchedule few:Size many:Size k:Size count:Size size:int streamed:int along:bool to_scratch:bool shape:Shape
        rates:Rates steps:Size in_tiles:bool
rlx.backends.cpu.schedule.winograd
    WinogradSchedule m:(int,int) n:(int,int) sizes:Shape kept:int rates:Rates
rlx.backends.cpu.runtime.image
    Tables source:Graph graph:Graph program:Program prepare:(Phase) run:(Phase) marks:{(Flow,str):int}
        schedule:Schedule plan:MemoryPlan|none spans:((int,int)) prepared:{Buffer:Array}|none params:{Buffer:Array}
        kernels:[{str:str}] runtime:[str]
"""

SCHEMA = Schema(RECORDS, NAMES)
